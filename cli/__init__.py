"""What a person types and sees.

inputs      what the user asked for, checked: settings, prompt, device, models, tokenizer
terminal    streamed text, drawn trees, the help of every setting
"""
