"""Row gathers, sums and conversions of a forward, for recorded programs."""
