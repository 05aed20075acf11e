"""The Python client: blocking and asyncio."""
