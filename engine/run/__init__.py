"""One forward over a ragged batch, captured or recorded where that pays."""
