"""SASRec as RecBole and gSASRec-pytorch train it."""
