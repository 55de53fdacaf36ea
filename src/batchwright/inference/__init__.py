"""What computes requests: bodies of OpenAI requests in, bodies of OpenAI responses out."""
