"""The resources of the machine that this process runs on."""
