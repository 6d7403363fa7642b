"""What depends on Keras and TensorFlow, and changes with their versions.

All private names are in `private_names`, each with its reason, and what is
replaced in Keras is in `hooks`. `replicas` is where replicas meet, `checks`
refuses arguments, `construction` makes models of other models, `python_state`
puts back what a user's objects hold; `optimizers` is small
helpers. It imports nothing else of accumodel.
"""
