"""`make gpu`: what a minute on a GPU can prove. rehearsal/ is the same without a GPU."""
