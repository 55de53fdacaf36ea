"""The OpenAI wire format: bodies to requests, responses to bodies."""
