"""`clearhead look`: one prompt, many sources, and how much of the attention each of them gets."""
