"""Writing new keys and values into the paged cache: one file per implementation, one signature."""
