"""Makes and evaluates the demo family in models/."""
