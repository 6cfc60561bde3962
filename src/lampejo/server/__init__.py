"""The server: an HTTP API over one ``LLM``, in the shapes of OpenAI's and Anthropic's (``app.make_app``)."""
