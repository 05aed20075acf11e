"""The drafter service: guesses tokens. Any guess is safe; only the speed depends on it."""
