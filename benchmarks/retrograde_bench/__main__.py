from .commands import main, prepare

if __name__ == "__main__":
    prepare()
    main()
