"""Replay: judge a rule by a target's recorded text, without the target.

Which rows a rule drafts depends on the draft, and which of them are accepted depends on the text.
So trees, paths and rows are those of a real run. Times follow from prices.

texts       recorded texts, their files, and texts of people in their place
models      a target that knows only texts
candidates  the draft's candidates at every position of a text
draft       a draft that knows only them
prices      what an iteration, a row and a draft pass cost
"""
