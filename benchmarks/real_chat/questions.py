"""Questions as people ask them: to explain, list, write, code, translate, summarise, compare and advise.

And edits and summaries of a given text, whose answers repeat much of it. Written for this benchmark: no data set has
them, so no draft was trained on their answers.
"""

from __future__ import annotations

import functools
from itertools import chain
from pathlib import Path

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

_MINUTES = (
    "The committee met on 4 May in the town hall. Mrs Keller reported that the playground needs new swings and that "
    "the old ones will be taken down before the summer. Mr Brandt asked for three offers by the end of the month. The "
    "committee agreed to spend at most 6,000 euros and to ask the school for help with the painting."
)
_EMAIL = (
    "Hello everyone, the workshop on Tuesday starts at 10 in room 214 and not at 9 as I wrote before. Please bring "
    "your laptop and the printed form. Lunch is at half past twelve in the canteen. Whoever cannot come should tell "
    "Jonas until Friday, so that we order the right number of meals. Best wishes, Petra"
)
_FUNCTION = """def total_price(items, discount):
    total = 0
    for item in items:
        total += item.price * item.count
    if discount > 0:
        total = total - total * discount
    return round(total, 2)"""
_PAGE = """<ul>
  <li>Monday: soup and bread</li>
  <li>Tuesday: rice with vegetables</li>
  <li>Wednesday: pasta with tomatoes</li>
  <li>Thursday: fish and potatoes</li>
  <li>Friday: pizza</li>
</ul>"""

_ABOUT_PROSE = (
    "Correct any mistakes in this text and change nothing else:\n\n{}",
    "Summarise this text in three sentences:\n\n{}",
    "Rewrite this text in the past tense and keep everything else:\n\n{}",
    "Copy this text and put every sentence on a line of its own:\n\n{}",
)
_ABOUT_CODE = (
    "Rename total_price to order_total in this function and print all of it:\n\n{}",
    "Add a docstring to this function and print all of it:\n\n{}",
    "Add type hints to this function and print all of it:\n\n{}",
    "Explain this function line by line, quoting each line:\n\n{}",
)
_ABOUT_PAGE = (
    "Change Friday to 'Friday: closed' and print the whole list again:\n\n{}",
    "Turn this HTML list into a Markdown list:\n\n{}",
    "Number the days in this list from 1 to 5 and print the whole list again:\n\n{}",
    "Add Saturday and Sunday to this list and print all of it:\n\n{}",
)

# One of each kind of text in turn, so that any few in a row are of all kinds.
EDITS = tuple(
    chain.from_iterable(
        (prose.format(_MINUTES), code.format(_FUNCTION), again.format(_EMAIL), page.format(_PAGE))
        for prose, code, again, page in zip(
            _ABOUT_PROSE, _ABOUT_CODE, (*_ABOUT_PROSE[2:], *_ABOUT_PROSE[:2]), _ABOUT_PAGE, strict=True
        )
    )
)
PROMPTS = {"questions": QUESTIONS, "edits": EDITS}

_DOCS = Path(__file__).parents[2] / "docs"
# characters of the documentation per token, about
_TOKEN_CHARS = 3.4


def after_text(question: str, num_tokens: int, place: int) -> str:
    """Returns the question after about `num_tokens` tokens of documentation, which differ from the first one on."""
    if not num_tokens:
        return question
    text, num_chars = _documentation(), round(num_tokens * _TOKEN_CHARS)
    start = (place * 7919) % len(text)
    return f"{(text[start:] + text)[:num_chars]}\n\n{question}"


@functools.cache
def _documentation() -> str:
    return "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
