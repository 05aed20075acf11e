"""The drafter service: proposes tokens. Any proposal is safe; it affects only speed."""
