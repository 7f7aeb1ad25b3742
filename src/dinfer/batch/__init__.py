"""Files of many requests, answered offline: OpenAI's batch form in, one result a line out."""
