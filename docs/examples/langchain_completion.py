"""LangChain's OpenAI class:  pip install langchain-openai && python docs/examples/langchain_completion.py [URL]"""

from __future__ import annotations

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
model = OpenAI(base_url=url, api_key="unused", model="demo-target", temperature=0, max_tokens=32)

chain = PromptTemplate.from_template("def {name}({arguments}):\n") | model | StrOutputParser()
print(chain.invoke({"name": "add", "arguments": "a, b"}))
for text in model.stream("import os"):
    print(text, end="", flush=True)
print()
