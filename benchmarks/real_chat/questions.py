"""Questions as people ask them: to explain, list, write, code, translate, summarise, compare and advise.

Written for this benchmark: no data set has them, so no draft was trained on their answers.
"""

from __future__ import annotations

_NOTICE = (
    "The library will be closed from Monday to Wednesday while the heating is replaced. Books that are due on these "
    "days may be returned until Friday without a fee. The reading room on the second floor stays open in the afternoon."
)

QUESTIONS = (
    "Why does bread rise, and what goes wrong when it stays flat?",
    "List eight things to check before buying a used bicycle.",
    "Write a short letter to my landlord about a dripping kitchen tap.",
    "Write a Python function that returns the second largest number of a list.",
    "Translate into French: The train to Lyon leaves at nine, and we have not packed yet.",
    f"Summarise this notice in two sentences: {_NOTICE}",
    "What is the difference between a virus and a bacterium?",
    "I have to speak in front of sixty people next week. How do I prepare?",
    "Explain to a ten-year-old how a lighthouse helps ships.",
    "Give me five ideas for a rainy Sunday with two small children.",
    "Write a poem of eight lines about a lost umbrella.",
    "Write an SQL query that counts the orders of each customer in the last month.",
    "How do you say in Spanish: I would like a table for four near the window, please?",
    "Which is better for a small balcony, tomatoes or strawberries, and why?",
    "Make a packing list for three days of hiking in autumn.",
    "What does a judge do in a court, step by step?",
    "Explain what inflation is, with an example from a bakery.",
    "List the planets of the solar system with one fact about each.",
    "Write the beginning of a story in which a clockmaker finds a letter.",
    "Write a bash script that renames all .jpeg files in a folder to .jpg.",
    "Translate into German: My neighbour's dog barks every night, but nobody complains.",
    "Rewrite this more politely: Send me the report today, I have waited long enough.",
    "How does a refrigerator keep food cold?",
    "What should I cook with rice, two eggs, an onion and some spinach?",
    "Explain the difference between weather and climate.",
    "Name six inventions of the nineteenth century and who made them.",
    "Write a product description for a wooden desk lamp.",
    "Write an HTML page with a heading, a picture and a link.",
    "What are the advantages and disadvantages of working from home?",
    "My cat does not eat since yesterday. What should I look out for?",
    "Write an email that invites colleagues to a farewell lunch on Thursday.",
    "How did people tell the time before there were clocks?",
)
