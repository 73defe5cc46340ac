"""Files and batches of OpenAI's API: the store on disk, and the process that answers the batches."""
