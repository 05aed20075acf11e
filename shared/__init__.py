"""Code that all services share, without torch or numpy. Only `wire` and `rpc` use the generated gRPC code."""
