"""The command line.

main      one generation: options, streamed text, summary, reports
options   options of methods, sampling and models, and what they choose
prompts   prompts in files (--prompt-file, --prompts)
load      files of the user's that add methods (--load)
terminal  the progress of slow passes, the list of methods and settings
compare   a generation compared with ar (--compare)
program   the frame of every program: parser, one line per user mistake, exit status
start     the start of every program, before torch is imported
"""
