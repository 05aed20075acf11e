"""The Python client and the `outrider` command. Speaks gRPC; imports no service and no torch."""
