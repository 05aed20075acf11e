"""Draft methods, one per file. `registry` builds them by name, `interface` is their contract."""
