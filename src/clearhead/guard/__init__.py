"""The guard: which text pulled which heads away from the instruction, with its false alarms measured."""
