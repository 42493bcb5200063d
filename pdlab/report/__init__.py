"""Text, pictures and the HTML page made of curves and checks."""
