"""The stages of one evaluation, in the judge: nothing foreign runs here."""
