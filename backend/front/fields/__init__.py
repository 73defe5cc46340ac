"""The bodies of requests and answers, as msgspec structs."""
