"""`tridecode bench`: the engine alone, a server under load, and other engines on the same shapes.

command    the commands and their options              jobs      the Job that the options describe
measure    the procedure that every engine goes through
engines/   one file per engine                         load/     the load generator and its prompts
shapes/    well-known models with random weights       studies/  measurements of one question each
reports/   tables, JSON files and plots                results/  published runs
"""
