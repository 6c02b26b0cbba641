"""The EASGD family of SC17: equations, methods, the center and the links to it."""
