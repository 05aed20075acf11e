"""What a service does with a draft method's weights: several heads, new versions of them, and loading those."""
