<<<<<<< HEAD
"""Parts of drafting that several packages share: names of methods, load classes, A/B trials."""
=======
"""What several packages share of drafting: the names of methods, and texts that are predicted."""
>>>>>>> gwcalls
