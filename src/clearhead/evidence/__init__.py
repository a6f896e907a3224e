"""What a map is worth as evidence: until it has been tested on a model and an input, a plain sentence."""
