"""One request: its types, its start or resumption, its record, and the decode loop."""
