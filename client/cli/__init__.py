"""The `outrider` command: one command or family of commands is one file."""
