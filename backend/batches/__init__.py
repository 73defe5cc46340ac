"""Files of requests in OpenAI's batch format: their lines, the requests, the files of answers."""
