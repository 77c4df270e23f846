"""What an output has to be: grammars from what a request asks for, and masks of ids from grammars."""
