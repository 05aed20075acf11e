"""The protocol with every fault from a seed: the real classes in one process, on virtual time."""
