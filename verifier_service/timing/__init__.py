"""Cost model of forwards, batch gathering, and the prompt rows that fit a time limit."""
