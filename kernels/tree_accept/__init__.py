"""The draft path that the target's own tokens walk down."""
