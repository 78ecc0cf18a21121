"""What loads models and makes them fast; it knows no tree.

checkpoint    config.json and safetensors: found, checked, loaded
cuda_graphs   passes of a few fixed shapes: captured, replayed
sampling      temperature, top-p, drawing without replacement
streaming     a cache of constant size for text of any length
"""
