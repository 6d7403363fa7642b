"""What depends on versions of Keras and TensorFlow, and on strategies."""
