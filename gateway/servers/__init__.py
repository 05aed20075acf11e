"""The HTTP and gRPC servers: admission, limits, authentication, quotas."""
