"""One page that shows a kernel from its Python lines to its machine code (`epdsl report`)."""
