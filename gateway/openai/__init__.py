"""The OpenAI API: request bodies to validated requests, and updates to answers.

An answer is what any API of the gateway returns for a request; a response is an object of the Responses API
(gateway/responses), which may be stored.
"""
