"""Draft methods: one method = one file. `registry` builds them by name, `interface` is their contract."""
