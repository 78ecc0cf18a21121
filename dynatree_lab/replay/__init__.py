"""Replay: what a method does on a pair, judged by recorded texts of the target.

texts       recorded texts, one a line of a file
models      the target that writes a recorded text again
candidates  recorded candidates of the draft
prices      prices of passes, and the speed that follows from them
"""
