"""Converts prompts to token ids and the engine's events to text. Used by every front end.

No Triton, numpy, torch or transformers here. In the order of use:

    load_tokenizer           a tokenizer folder, with its end token (`tokenizer_files`)
    encode, bad_word_ids     texts to token ids (`encoding`)
    TokenizerView            tokenizer properties that decoding needs (`detokenizer`)
    StopAutomaton            the stop words of a row, prepared once (`stop_words`)
    Completion, Answer       the engine's events to pieces of text, log-probs, finish reasons (`completion`)

backend/service has the size limits and submits requests; a front end knows what its requests' fields mean.
"""
