"""RMS norm of groups of a row together with its gate: the end of most recurrent mixers."""
