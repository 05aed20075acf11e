"""Who is asking, and whether and when the request may start: keys, quotas, memory, whose turn it is."""
