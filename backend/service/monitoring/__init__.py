"""The metrics and the request log of a front end, whichever protocol it speaks."""
