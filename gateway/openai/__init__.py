"""The OpenAI API: request bodies to validated requests, and updates to answers."""
