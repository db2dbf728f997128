"""OpenAI's API as data: parameters, requests, responses, errors."""
