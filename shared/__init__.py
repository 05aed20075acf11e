"""What all services share. Light: no torch, no numpy. Only `wire` and `rpc` know the generated gRPC code."""
